//! A fine-tuning from its base to a checkpoint in FP8, for two architectures: LoRA on FP8-only
//! weights from chats, the adapter, its merge, and the export.

use std::fs;

use crate::support::{command, float8, python, set, small, stdout, train};

#[test]
fn lora_on_an_fp8_base_becomes_a_checkpoint_in_fp8() {
    for architecture in ["llama3", "qwen3"] {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let chat = r#"{"messages": [{"role": "user", "content": "What is FP8?"}, {"role": "assistant", "content": "Eight bits."}]}"#;
        fs::write(path("chats.jsonl"), format!("{chat}\n").repeat(80)).unwrap();
        fs::write(path("chat.jinja"), "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}").unwrap();
        let run = |command: &str, arguments: &[&str]| {
            let output = float8(&[&[command, "--device", "cpu"], arguments].concat());
            stdout(&output).to_string()
        };

        let [base, base_run, adapter, lora] = ["base", "base_run", "adapter", "lora"].map(path);
        fs::write(path("text.txt"), "What is FP8? Eight bits.\n".repeat(400)).unwrap();
        let mut first = train(&small(&path("text.txt"), &[&format!("model.type={architecture}")]));
        stdout(&first.args(["--steps", "1", "--output-dir", &base_run]).output().unwrap());
        run("export", &[&base_run, "--output", &base, "--format", "f32"]);

        let text = set(&["data.tokenizer=bytes", &format!("data.chat_template={}", path("chat.jinja"))]);
        let settings = ["lora.rank=4", "lora.base=fp8", "training.seq_len=64", "training.eval_batches=2"];
        let data = path("chats.jsonl");
        let mut fine_tune = train(&[set(&settings), text.clone()].concat());
        fine_tune.args(["--device", "cpu", "--model", &base, "--data", &data, "--recipe", "rowwise", "--lr", "1e-2"]);
        fine_tune.args(["--batch-size", "2", "--steps", "6", "--output-dir", &lora]);
        let log = stdout(&fine_tune.output().unwrap()).to_string();
        assert!(log.contains("trainable parameters: "), "{architecture}: {log}");
        run("export", &[&lora, "--output", &adapter]);
        run("export", &[&lora, "--output", &path("merged"), "--merge-adapters", "--format", "f32"]);
        let fp8 = ["--output", &path("fp8"), "--format", "fp8", "--recipe", "rowwise", "--set", "data.tokenizer=bytes"];
        run("export", &[&[&*path("merged")], &fp8[..]].concat());

        let eval = |model: &str, more: &[&str]| -> f64 {
            let mut eval = command(&["eval", &path(model), "--device", "cpu", "--data", &data]);
            eval.args(&text).args(set(&["training.seq_len=64", "training.batch_size=2"])).args(more);
            let output = eval.output().unwrap();
            let line = stdout(&output).lines().find_map(|line| line.split_once("validation loss: ")).unwrap().1;
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        let [before, trained] = [eval("base", &["--precision", "f32"]), eval("lora", &[])];
        assert!(trained < before - 0.5, "{architecture}: {before} {trained}");
        // The base of the adapter is cast alike; the merged weights are cast as one.
        let adapted = eval("adapter", &["--fp8-weights", "--set", "float8.recipe=rowwise"]);
        assert!((adapted - trained).abs() < 1e-3, "{architecture}: {trained} {adapted}");
        for (model, precision) in [("merged", &["--precision", "f32"][..]), ("fp8", &[])] {
            let exported = eval(model, precision);
            assert!((exported - trained).abs() < 0.05, "{architecture}, {model}: {trained} {exported}");
        }
        // PEFT and transformers read all of it.
        python("whole_way.py", "compressed_tensors, peft, transformers", folder.path());
    }
}
