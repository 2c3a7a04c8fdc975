"""Named parts of a reward, and how they are combined."""
