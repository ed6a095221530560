"""Several servers behind one client: stops, freezes, kills and upgrades servers while calls go on.

`python -m scripts.drill` runs it with containers or with processes, and fails if a call fails.
"""
