"""What the trainers share; imports nothing from the other folders."""
