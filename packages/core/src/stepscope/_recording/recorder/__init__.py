"""Flight recorder: spans of the last steps in memory, written as steps when a trigger asks for them."""
