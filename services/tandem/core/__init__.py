"""Floor 0, values, errors, configuration and clock; imports nothing else of Tandem."""
