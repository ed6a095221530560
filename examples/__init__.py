"""Programs that use the service, each run by a test; README.md says what each shows."""
