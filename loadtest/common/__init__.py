"""Provide statistics, tables, plots and small models that several measurements use."""
