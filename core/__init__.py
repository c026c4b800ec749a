"""Code that all trainers share; it imports nothing from the other folders."""
