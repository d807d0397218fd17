"""A backend, an engine adapter, a reader and a report section, as another project writes them."""
