"""Where each clock stands against the owner's: by its samples, and closer by what must have come first."""
