"""The calls: what each encodes into requests, and how it decodes their responses."""
