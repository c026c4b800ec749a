"""Makers of the tiny models and the voice that tests and the demo need, and the judge of the demo."""
