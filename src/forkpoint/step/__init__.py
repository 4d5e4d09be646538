"""Steps of a policy: from a request to its results."""
