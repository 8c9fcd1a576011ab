"""How long a simulated step takes: rooflines, hardware, model shapes, measured residuals and replayed steps."""
