"""A plain torch training loop in one process, profiled: python examples/existing_loop.py

The lines that profile the loop are marked `# stepscope`.
"""

import torch
from torch import Tensor, nn

from stepscope import capture, configure, profile_step, span  # stepscope

model = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


@profile_step(role="actor")  # stepscope
def update_actor(states: Tensor, actions: Tensor, rewards: Tensor) -> None:
    log_probs = model(states).log_softmax(-1).gather(1, actions)
    loss = -(log_probs * (rewards - rewards.mean())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    configure(save_path="outputs/existing_loop", steps=[10, 20])  # stepscope
    for step in range(30):
        with capture(step, role="actor"):  # stepscope
            with span("generate", role="rollout"):  # stepscope
                states = torch.randn(512, 8)
                actions = model(states).softmax(-1).multinomial(1)
            with span("compute_reward", role="reward"):  # stepscope
                rewards = (actions == states.argmax(dim=1, keepdim=True)).float()
            update_actor(states, actions, rewards)
        print(f"step {step}: mean reward {rewards.mean().item():.3f}")


if __name__ == "__main__":
    main()
    print("See where the steps went: stepscope report outputs/existing_loop")
