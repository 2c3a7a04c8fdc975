"""Published weights: deltas, the exchange, publisher and subscriber."""
