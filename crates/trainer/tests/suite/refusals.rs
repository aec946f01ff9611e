//! Refused settings: `refusals/settings.jsonl` has the settings of a run, the wrong one last, and
//! the text of the error.

use crate::common::*;

#[test]
fn wrong_settings_are_named() {
    let data = text();
    let mut unnamed = vec![];
    for (settings, says) in table::<(Vec<String>, String)>("refusals/settings") {
        let settings: Vec<_> = settings.iter().map(String::as_str).collect();
        let error = match try_run_config(data.path(), &settings) {
            Ok(config) => config.validate().and_then(|()| run(&config).map(drop)).expect_err(&says).to_string(),
            Err(error) => {
                let origin = format!("--set {}: ", settings[settings.len() - 1]);
                error.to_string().strip_prefix(&origin).unwrap_or_else(|| panic!("{error}")).to_string()
            }
        };
        if !error.contains(&says) {
            unnamed.push(format!("{settings:?}: {error}"));
        }
    }
    assert!(unnamed.is_empty(), "{}", unnamed.join("\n"));
}
