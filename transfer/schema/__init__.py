"""Checks of YAML files: models, field types, line numbers, and sentences about mistakes."""
