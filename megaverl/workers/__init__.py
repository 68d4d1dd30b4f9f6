"""Ray worker processes: one per rank, colocating the roles of its pool."""
