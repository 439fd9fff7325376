"""What is accepted: rules, residuals, scores after processors, and the one transfer to the host."""
