"""OpenAI-style completions service that runs one MoE kernel variant."""
