//! torchtitan's section `[activation_checkpoint]`, read as `training.activation_checkpointing`.

use serde::Deserialize;
use toml::{Table, Value};

use super::ActivationCheckpointing;

const SECTION: &str = "activation_checkpoint";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Section {
    mode: String,
    selective_ac_option: Option<Value>,
}

impl Section {
    /// Value of `training.activation_checkpointing`.
    fn value(&self) -> Result<Value, String> {
        let option = self.selective_ac_option.as_ref().map(|option| match option {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        });
        let number = option.as_ref().and_then(|text| text.parse::<u32>().ok()).filter(|layers| *layers > 0);
        match (self.mode.as_str(), number) {
            (mode @ ("none" | "full"), _) => Ok(mode.into()),
            ("selective", Some(1)) => Ok("full".into()),
            ("selective", Some(layers)) => Ok(i64::from(layers).into()),
            ("selective", None) => Err(format!(
                "{SECTION}.selective_ac_option = \"{}\": no operations are chosen here; give a number of layers, \
                 or set training.activation_checkpointing = \"full\"",
                option.unwrap_or_else(|| "op".into()),
            )),
            (mode, _) => Err(format!("{SECTION}.mode = \"{mode}\" is not \"none\", \"full\" or \"selective\"")),
        }
    }
}

/// Replaces the section, if present, by the equivalent key. Returns whether it was present.
pub(super) fn translate(table: &mut Table) -> Result<bool, String> {
    let Some(section) = table.remove(SECTION) else { return Ok(false) };
    let section: Section = section.try_into().map_err(|error| format!("{SECTION}: {}", error.message()))?;
    let value = section.value()?;
    let training = table.entry("training").or_insert_with(|| Value::Table(Table::new()));
    let training = training.as_table_mut().ok_or("`training` is not a section")?;
    let parsed = |value: &Value| value.clone().try_into::<ActivationCheckpointing>().ok();
    match training.insert("activation_checkpointing".into(), value.clone()) {
        Some(other) if parsed(&other) != parsed(&value) => Err(format!(
            "training.activation_checkpointing = {other}, but [{SECTION}] says {value}: leave one of them out"
        )),
        _ => Ok(true),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::{Setting, TrainingSection, load};

    #[derive(Debug, Default, serde::Serialize, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Config {
        training: TrainingSection,
    }

    /// Value of the key in a file with these settings, or the error.
    fn read(text: &str, settings: &[&str]) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        std::fs::write(&path, text).unwrap();
        let settings: Vec<_> = settings.iter().map(|setting| Setting::new(*setting)).collect();
        let replaces = [("activation_checkpoint.mode", "training.activation_checkpointing")];
        let config = load::<Config>(Some(Path::new(&path)), &settings, &replaces).map_err(|error| error.to_string())?;
        Ok(Value::try_from(config.training.activation_checkpointing).unwrap().to_string())
    }

    #[test]
    fn the_section_says_what_the_key_does() {
        let section = |lines: &str| read(&format!("[activation_checkpoint]\n{lines}"), &[]);
        for (lines, expected) in [
            ("mode = 'none'", "\"none\""),
            ("mode = 'full'\nselective_ac_option = 'op'", "\"full\""),
            ("mode = 'selective'\nselective_ac_option = '1'", "\"full\""),
            ("mode = 'selective'\nselective_ac_option = '2'", "2"),
            ("mode = 'full'\n[training]\nactivation_checkpointing = 1", "\"full\""),
            ("mode = 'full'\n[training]\nbatch_size = 3", "\"full\""),
        ] {
            assert_eq!(section(lines).as_deref(), Ok(expected), "{lines}");
        }
        for (lines, expected) in [
            ("mode = 'selective'\nselective_ac_option = 'op'", "selective_ac_option = \"op\": no operations"),
            ("mode = 'selective'\nselective_ac_option = '0'", "selective_ac_option = \"0\""),
            ("mode = 'selective'", "give a number of layers"),
            ("mode = 'memory_budget'", "mode = \"memory_budget\" is not"),
            ("mode = 'full'\nearly_stop = true", "early_stop"),
            ("selective_ac_option = '2'", "mode"),
            (
                "mode = 'full'\n[training]\nactivation_checkpointing = 2",
                "= 2, but [activation_checkpoint] says \"full\"",
            ),
        ] {
            let error = section(lines).unwrap_err();
            assert!(error.contains(expected) && error.contains("run.toml"), "{lines}: {error}");
        }
    }

    #[test]
    fn settings_replace_what_a_file_says_under_either_name() {
        let [ours, theirs] = ["[training]\nactivation_checkpointing = 2", "[activation_checkpoint]\nmode = 'full'"];
        let none = ["activation_checkpoint.mode=none"];
        assert_eq!(read(ours, &none).as_deref(), Ok("\"none\""));
        assert_eq!(read(theirs, &none).as_deref(), Ok("\"none\""));
        assert_eq!(read(theirs, &["training.activation_checkpointing=3"]).as_deref(), Ok("3"));
        let two = ["activation_checkpoint.mode=selective", "activation_checkpoint.selective_ac_option=2"];
        assert_eq!(read(theirs, &two).as_deref(), Ok("2"));
        let error = read("", &["activation_checkpoint.mode=op"]).unwrap_err();
        assert!(error.contains("--set activation_checkpoint.mode=op"), "{error}");
    }
}
