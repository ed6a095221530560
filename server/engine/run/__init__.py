"""Where graphs run, and what runs cost: sessions, execution providers, memory, timings."""
