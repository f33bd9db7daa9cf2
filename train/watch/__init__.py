"""What a training run did so far, as one page or one picture: from its log alone, while it trains or after."""
