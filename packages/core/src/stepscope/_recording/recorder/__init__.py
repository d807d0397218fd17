"""The flight recorder: spans of the last steps in memory, which are written as steps upon a trigger."""
