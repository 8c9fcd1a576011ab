"""Make the pictures of the documents from a real cluster under load."""
