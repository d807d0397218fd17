"""This process: its identity, its clock, its forks, its failures and its end."""
