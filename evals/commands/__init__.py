"""One module per subcommand of `evals`."""
