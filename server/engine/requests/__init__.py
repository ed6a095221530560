"""What requests contain and ask for: texts, lengths, and the parts of outputs that they select."""
