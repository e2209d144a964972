"""What every YAML file of ours is checked with: models, fields, lines, and sentences about mistakes."""
