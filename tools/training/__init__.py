"""Training the embedded model: text and tokenizer, a forward that can be differentiated, the optimiser, the export."""
