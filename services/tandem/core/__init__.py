"""Floor 0: values, errors, configuration and the clock; imports nothing else of Tandem."""
