"""Operators on packed rows that read boundary state of other rows; they know no engine or host."""
