"""Steps of several ranks: their topology, and their agreement before each step."""
