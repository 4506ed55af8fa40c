"""What repro.py shows: claims and their verdicts, the terminal, the pages."""
