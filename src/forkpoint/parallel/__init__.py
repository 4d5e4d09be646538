"""Steps of several ranks: who they are, and what they agree on before each step."""
