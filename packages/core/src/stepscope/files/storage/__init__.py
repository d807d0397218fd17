"""How files are written whole and read safely."""
