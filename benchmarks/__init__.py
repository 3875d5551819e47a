"""Speed and memory, measured on whole commands. Figures are printed; nothing is judged."""
