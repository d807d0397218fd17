"""Sections of a report, one module each: its types, its computation and its drawings. `report` lists them."""
