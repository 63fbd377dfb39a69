"""The virtual device: operators on fake tensors go in, tensors with the card's shapes, types and strides come out.

It answers as torch.cuda of the card would, and notes each answer that rests on an assumption about data.
"""
