"""``h2d doctor``: is this machine fit, and would its trainings be served? Each file looks at one subject."""
