"""What each precision choice costs on text that the model has not seen: bits, chosen entries and experts, needles, drafts."""
