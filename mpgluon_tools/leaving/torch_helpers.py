"""The texts of a layer and of functions that PyTorch lacks, for programs that need them."""

__all__ = ["HELPERS", "LOAD"]

LOAD = '''

def load(path="model.safetensors"):
    """Return the network with the parameters of a file, for inference."""
    from safetensors.torch import load_file

    net = Network()
    net.load_state_dict(load_file(path))
    return net.eval()
'''
"""The end of each program."""

HELPERS = {"Frozen": '''
class Frozen(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm that uses its running statistics in training too."""

    def forward(self, x):
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x, *statistics, self.weight, self.bias, False, 0.0, self.eps)

''', "box_nms": '''
def box_nms(x, threshold, valid, top, corner, score, category, background, across, centers):
    """Keep the best of boxes that overlap, sorted by their scores; all other rows are -1."""
    results = []
    for boxes in x.flatten(0, -3):
        is_valid = boxes[:, score] > valid
        if category >= 0:
            is_valid &= boxes[:, category] != background
        boxes = boxes[is_valid]
        boxes = boxes[boxes[:, score].argsort(descending=True, stable=True)][:top]
        low, high = boxes[:, corner : corner + 2], boxes[:, corner + 2 : corner + 4]
        if centers:
            low, high = low - high / 2, low + high / 2
        area = (high - low).clamp(0).prod(1)
        kept = torch.ones(len(boxes), dtype=torch.bool, device=x.device)
        for place in range(len(boxes)):
            if kept[place]:
                after = slice(place + 1, None)
                first = torch.maximum(low[place], low[after])
                last = torch.minimum(high[place], high[after])
                inside = (last - first).clamp(0).prod(1)
                rivals = inside > threshold * (area[place] + area[after] - inside)
                if category >= 0 and not across:
                    rivals &= boxes[after, category] == boxes[place, category]
                kept[after] &= ~rivals
        results.append(F.pad(boxes[kept], (0, 0, 0, x.shape[-2] - int(kept.sum())), value=-1.0))
    return torch.stack(results).reshape(x.shape)

''', "box_decode": '''
def box_decode(x, anchors, scales, largest, corners):
    """Return boxes by their corners from shifts and logarithms of sizes relative to anchors."""
    middle, sides = anchors[..., :2], anchors[..., 2:]
    if corners:
        middle, sides = (middle + sides) / 2, sides - middle
    x = x * torch.tensor(scales, device=x.device)
    middle, half = x[..., :2] * sides + middle, x[..., 2:].clamp(max=largest).exp() * sides / 2
    return torch.cat([middle - half, middle + half], -1)

''', "roi_align": '''
def roi_align(x, boxes, size, scale, samples, aligned):
    """Return the means of bilinear samples in the parts of boxes, (box, channel, *size)."""

    def weights(first, side, parts, length):
        places = (torch.arange(parts * samples, device=x.device) + 0.5) / (parts * samples)
        places = first[:, None] + side[:, None] * places
        inside = (places >= -1) & (places <= length)
        distances = places.clamp(0, length - 1)[..., None] - torch.arange(length, device=x.device)
        shares = (1 - distances.abs()).clamp(0) * inside[..., None]
        return shares.unflatten(1, (parts, samples)).mean(2)

    first, last = ((boxes[:, one : one + 2] * scale - aligned * 0.5).unbind(1) for one in (1, 3))
    sides = [high - low if aligned else (high - low).clamp(1) for low, high in zip(first, last)]
    columns, rows = map(weights, first, sides, size[::-1], (x.shape[3], x.shape[2]))
    images, results = x.permute(0, 2, 3, 1).flatten(2), []  # (image, row, columns and channels)
    for number, row, column in zip(boxes[:, 0].long(), rows, columns):
        results.append(column @ (row @ images[number]).unflatten(1, (x.shape[3], x.shape[1])))
    return torch.stack(results).permute(0, 3, 1, 2)

'''}  # fmt: skip
"""Their texts by their names; a program has those that it calls."""
