"""The embedded task and model: generated word problems, never GSM8K."""
