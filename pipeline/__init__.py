"""The work: rooms that each hold one noun of the system."""
