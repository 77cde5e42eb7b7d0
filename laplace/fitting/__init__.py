"""From data to one frozen `Fit`, and the next posterior."""
