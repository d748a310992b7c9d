"""What a person sees: text for the terminal, progress while solving, pictures."""
