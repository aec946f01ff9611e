//! [`StopStrings`]: cuts streamed text at the first of several strings.

/// Streamed text. A suffix that may be the beginning of a stop string is held back.
pub(super) struct StopStrings<'a> {
    stop: &'a [String],
    held: String,
}

impl<'a> StopStrings<'a> {
    pub(super) fn new(stop: &'a [String]) -> Self {
        Self { stop, held: String::new() }
    }

    /// Text that is certain after another piece, and whether a stop string ended it.
    pub(super) fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        if let Some(end) = self.stop.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(end);
            return (core::mem::take(&mut self.held), true);
        }
        let begins = |from: &usize| {
            let rest = &self.held[*from..];
            self.stop.iter().any(|stop| stop.starts_with(rest))
        };
        let certain = self.held.char_indices().map(|(at, _)| at).find(begins).unwrap_or(self.held.len());
        let rest = self.held.split_off(certain);
        (core::mem::replace(&mut self.held, rest), false)
    }

    /// The held text, if nothing follows.
    pub(super) fn finish(&mut self) -> String {
        core::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(stop: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let stop: Vec<String> = stop.iter().map(ToString::to_string).collect();
        let mut strings = StopStrings::new(&stop);
        let mut given = vec![];
        for piece in pieces {
            let (text, ends) = strings.push(piece);
            given.push(text);
            if ends {
                return (given, true);
            }
        }
        given.push(strings.finish());
        (given, false)
    }

    #[test]
    fn a_string_in_pieces_ends_the_text() {
        let given = |stop: &[&str], pieces: &[&str]| {
            let (given, ends) = read(stop, pieces);
            (given.concat(), ends)
        };
        assert_eq!(given(&["\n\n"], &["a\n", "b\n", "\nc"]), ("a\nb".into(), true));
        assert_eq!(given(&["END", "E"], &["xEN"]), ("x".into(), true));
        assert_eq!(given(&["aab"], &["a", "a", "a", "b", "c"]), ("a".into(), true));
        assert_eq!(given(&["aab"], &["a", "a", "c", "a", "a"]), ("aacaa".into(), false));
        assert_eq!(given(&["né"], &["n", "n", "é!"]), ("n".into(), true));
        assert_eq!(given(&[], &["a", "b"]), ("ab".into(), false));
    }

    #[test]
    fn only_what_may_be_its_beginning_is_held_back() {
        assert_eq!(read(&["##"], &["a#", "b", "#", "#"]).0, ["a", "#b", "", ""]);
    }
}
