//! A training step of a realistic width on the CPU: four layers 2,048 wide with Llama 3's
//! vocabulary, one sequence of 2,048 tokens.
use std::time::Instant;

use device_select::SelectedDevice;
use test_data::Counting;

use crate::model::{Train, with_job};
use crate::table::{Table, number};

const SETTINGS: [&str; 16] = [
    "training.steps=2",
    "model.overrides.vocab_size=128256",
    "data.tokenizer=bytes",
    "model.overrides.hidden_size=2048",
    "model.overrides.intermediate_size=8192",
    "model.overrides.num_hidden_layers=4",
    "model.overrides.num_attention_heads=32",
    "model.overrides.num_key_value_heads=8",
    "model.overrides.head_dim=64",
    "model.overrides.max_position_embeddings=2048",
    "training.batch_size=1",
    "training.seq_len=2048",
    "training.activation_checkpointing=full",
    "training.log_every=1",
    "training.eval_batches=1",
    "generate.max_new_tokens=0",
];

/// End times of the steps, from the lines of a run's log.
#[derive(Default)]
struct Steps(Vec<Instant>);

impl std::io::Write for Steps {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        if text.windows(5).any(|part| part == b"step:") {
            self.0.push(Instant::now());
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Table of one recipe.
pub fn table() -> Table {
    let (estimate, steps, peak_bytes) = with_job(&[&SETTINGS[..], &["float8.recipe=tensorwise"]].concat(), |job| {
        let device = Default::default();
        let estimate = job.memory_estimate::<Train>(1, &SelectedDevice::Cpu, &device).expect("a configuration");
        let mut steps = Steps::default();
        let mut run = || job.run::<Train>(&SelectedDevice::Cpu, &device, &mut steps).expect("it trains");
        let peak_bytes = Counting::peak_of(&mut run);
        (estimate, steps, peak_bytes)
    });
    let [first, second, ..] = steps.0[..] else { panic!("two steps") };
    let title = "a training step on the CPU, 4 layers 2,048 wide, 128,256 tokens in the vocabulary, 1 x 2,048 tokens";
    let mut table = Table::new(title, &["recipe", "seconds", "peak GiB", "estimated GiB"]);
    let [peak, estimated] = [peak_bytes as f64, estimate.peak() as f64].map(|bytes| number(bytes / f64::from(1 << 30)));
    table.row(["tensorwise".into(), number((second - first).as_secs_f64()), peak, estimated]);
    table
}
