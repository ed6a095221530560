"""The process of a server: its settings, start and drain, workers and their supervision, checks of models."""
