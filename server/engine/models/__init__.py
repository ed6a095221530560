"""Which models are served: artifacts on disk, how they are loaded and proven, and how they change."""
