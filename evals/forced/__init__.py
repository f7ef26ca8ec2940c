"""Teacher-forced evidence: the same texts through two servers, compared token by token."""
