"""What people and CI run beside the packages: the demo, its models, a local server."""
