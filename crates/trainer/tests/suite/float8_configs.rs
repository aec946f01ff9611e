//! `[float8]`: every key of `Float8Config` can be set in files and settings; invalid values are
//! named.

use crate::common::*;

fn file(text: &str) -> Result<RunConfig, Error> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.toml");
    fs::write(&path, text).unwrap();
    RunConfig::load(Some(&path), &[])
}

/// `[float8]` that differs from the default in every key.
fn everything() -> Table {
    let keys: Value = serde_json::from_str(include_str!("../vectors/float8_keys.json")).unwrap();
    Table::try_from(keys).unwrap()
}

/// In a file, and key by key, in an order in which some keys are valid only with later ones.
#[test]
fn every_key_reaches_float8_config() {
    let keys = everything();
    let expected: Float8Config = keys.clone().try_into().unwrap();
    let written = Table::try_from(&expected).unwrap();
    assert!(keys.keys().all(|key| written.contains_key(key)), "only what differs from the default is written");
    let text = Table::from_iter([("float8".to_string(), keys.clone().into())]).to_string();
    assert_eq!(file(&text).unwrap().float8(&tiny()), expected);
    let settings: Vec<_> = keys.iter().map(|(key, value)| format!("float8.{key}={value}")).collect();
    for settings in [settings.clone(), settings.into_iter().rev().collect()] {
        assert_eq!(RunConfig::load(None, &settings).unwrap().float8(&tiny()), expected, "{settings:?}");
    }
}

#[test]
fn a_printed_configuration_is_read_back() {
    let section = "schedule = { warmup = 1, cooldown = 0.1 }\nfilter_fqns = []\nrecipe = 'blockwise'";
    let of_file = file(&format!("[float8]\n{section}\n[training]\ngrad_clip_norm = inf\n[data]\ntokenizer = 'bytes'"));
    let moe = file("[model]\noverrides = { num_experts = 4, num_experts_per_tok = 2, rope_theta = 2e6 }");
    let all = Table::from_iter([("float8".to_string(), everything().into())]).to_string();
    for config in [RunConfig::default(), of_file.unwrap(), moe.unwrap(), file(&all).unwrap()] {
        let text = config.to_toml().unwrap();
        assert_eq!(file(&text).unwrap(), config, "{text}");
    }
}

/// Comments of the form `# key = value`, one for every key.
#[test]
fn the_examples_in_the_debug_config_are_right() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/llama3_debug.toml");
    let text = fs::read_to_string(path).unwrap();
    let section = text.split("\n[").find(|section| section.starts_with("float8]")).unwrap();
    let is_key = |key: &str| key.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    let examples = section.lines().filter_map(|line| line.strip_prefix("# ")?.split_once(" = "));
    let examples: BTreeMap<_, _> = examples.filter(|(key, _)| is_key(key)).collect();
    let lines: Vec<_> = examples.iter().map(|(key, value)| format!("{key} = {value}\n")).collect();
    file(&format!("[float8]\n{}", lines.concat())).unwrap();
    let missing: Vec<_> = everything().into_iter().filter(|(key, _)| !examples.contains_key(&**key)).collect();
    assert!(examples.contains_key("schedule") && missing.iter().all(|(key, _)| key == "recipe"), "{missing:?}");
}
