"""Tables, lists and sentences of each section, as the terminal and the page draw them."""
